"""Metrics in the dashboards that people already have, each through its own library."""
