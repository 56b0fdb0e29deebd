"""The sections of `benchmarks/gpu.py`, and what runs them.

    catalogue   which sections there are, and what each needs
    check       what a section finds: a number, its bound, a verdict
    ground      what a section stands on: the device, small or large models, rows
    supervise   a section in a process of its own, with a deadline
    report      the machine, the table, the JSON file

Every other module is a section: ``checks(ground)`` gives its checks one by one.
"""
