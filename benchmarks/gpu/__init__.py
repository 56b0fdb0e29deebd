"""The sections of `benchmarks/gpu.py`, and the code that runs them.

    catalogue   the list of sections, with the packages that each needs
    check       the result of one check: a number, its bound, a verdict
    ground      the conditions of a section: device, folder, small or large models
    supervise   runs a section in its own process, with a deadline
    report      facts about the machine, the table, the JSON file

Other modules are sections or shared helpers. A section's ``checks(ground)`` yields its checks one by one.
"""
