"""
One module a contestant. Each runs in a process of its own, perhaps in a virtual environment of its own.
"""
