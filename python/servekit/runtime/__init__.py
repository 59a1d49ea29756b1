"""Processes: how main starts, watches and ends its children, and what they share."""
