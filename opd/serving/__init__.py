"""The teacher server's parts.

job (one request) <- queue (order, admission) <- supervisor (the worker process) <- front (the socket of the clients).
The worker process runs `worker`, which shares only job's array helpers and `link`, the messages between the two.
"""
