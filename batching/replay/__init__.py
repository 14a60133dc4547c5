"""Replaying recorded traffic: traces, the memory of the small scheduler, the scheduler itself."""
