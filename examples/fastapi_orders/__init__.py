"""
A shop with FastAPI and an AsyncSession: orders that are paid, thanked for and shipped.
"""
