"""What starts a run elsewhere, as text: a SkyPilot job group, a KubeRay RayJob, a line for Ray's job server.

Here: what a run needs of a cluster, and its form for each of the three, with services as tasks of their own
and secrets as references. Not here: starting anything, or talking to a cluster; their own commands do that.
"""
