"""The teacher pool's parts.

placement (does it fit, plain arithmetic) <- replica (one teacher, kept alive by a thread) <- opd.teacher_pool (the
command line). `host` runs on the nodes of the Ray cluster: an actor that holds one server process, `child`.
"""
