"""
How fast jobs are pushed and run, each figure beside what loops by hand and other queues reach in the same run.
"""
