"""Documents that start a run elsewhere: for Slurm, SkyPilot, KubeRay or Ray's job server.

This package works out what a run needs from a cluster, and writes it in one of the four forms. The run's
services become separate tasks or containers, or the run starts them itself. The documents never contain
secrets, only references to them. Nothing is started here and no cluster is contacted; start the run with the
commands of Slurm, SkyPilot, Kubernetes or Ray.
"""
