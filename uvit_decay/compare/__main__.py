"""python -m uvit_decay.compare compare RUN RUN ... [--by alpha_min] [--x step|epoch|images] [--out compare.png]"""

from uvit_decay.compare.report import compare
from uvit_decay.runtime.command_line import run

if __name__ == "__main__":
    run({"compare": compare}, __doc__, "python -m uvit_decay.compare")
