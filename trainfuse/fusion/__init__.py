"""Groups of nodes that become one kernel."""
