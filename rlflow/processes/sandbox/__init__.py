"""What a process that handles text of strangers or models may do: its environment, its limits, and the
kernel's walls around it.

Here: Landlock, seccomp and limits as a process puts them around itself, and the probe that says which of them
hold on this machine. Not here: which processes get which walls (`rlflow.rewards.confinement`,
`rlflow.data.chat`), and what they do.
"""
