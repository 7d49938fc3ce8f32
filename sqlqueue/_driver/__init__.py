"""
Every SQL statement: plain functions from a connection to values. Nothing here begins, commits or swallows.
"""
