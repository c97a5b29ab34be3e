"""`python -m opd.pool.child PARENT ARGUMENTS...`: a teacher server that dies with the actor that started it."""

from __future__ import annotations

import sys

from opd.serving.worker import die_with
from opd.teacher_server import main

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
