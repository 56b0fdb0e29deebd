"""Documents that start a run elsewhere: for Slurm, SkyPilot, KubeRay or Ray's job server.

This package collects what a run needs from a cluster, and writes it in one of the four forms. The run's
services become separate tasks or containers, or the run starts them itself. Secrets are not written; the
documents only refer to them. The package starts nothing and contacts no cluster. Use the commands of Slurm,
SkyPilot, Kubernetes or Ray to start the run.
"""
