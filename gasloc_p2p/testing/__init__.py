"""A kit for testing swarms: virtual time, planned faults, and what every network must promise.

docs/testing.md shows how to use it. Nothing here needs pytest.
"""
