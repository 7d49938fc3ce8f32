"""
Accounts with Flask and a plain Session: people who sign up, change their profile and forget their password.
"""
