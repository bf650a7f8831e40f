"""What callqueue is compared with. Each module is a program or a configuration for one, and imports
nothing of callqueue.
"""
