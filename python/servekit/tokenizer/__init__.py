"""What stands between HTTP and the wire: templates, tokenizing, the state of live requests (`manager.py`)."""
