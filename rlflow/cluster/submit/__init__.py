"""Text that starts a run elsewhere: a SkyPilot job group, a KubeRay RayJob, or a Ray job command.

This package collects what a run needs of a cluster, and writes it in each of the three forms. Services become
separate tasks, and secrets become references. It starts nothing and contacts no cluster; use the tools' own
commands for that.
"""
