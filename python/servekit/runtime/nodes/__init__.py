"""Several machines as one server: how their mains meet and watch each other, and which sockets lie between them."""
