"""Text that starts a run elsewhere: a SkyPilot job group, a KubeRay RayJob, a Ray job command, or a Slurm script.

This package collects what a run needs from a cluster, and writes it in one of the four forms. Services
become separate tasks, and secrets become references. The package starts nothing and contacts no cluster; use
the commands of SkyPilot, Kubernetes, Ray or Slurm for that.
"""
