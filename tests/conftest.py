"""Set-up that every test shares."""

import os

# As in a scheduler process, and before anything imports torch: threads that wait for each other don't turn for long,
# so that tests finish in time on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
