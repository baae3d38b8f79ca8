"""The mutation tests (`make mutants`): mutmut, with its copy of the sources for the installed package.

mutmut puts its folder ``mutants/src`` in front of `sys.path`. An editable install has a finder that comes
before `sys.path` and leads to the sources themselves; it is left out here. The kernels' library is not
copied: the tests are told where it is.
"""

import os
import sys
from importlib.metadata import files

from mutmut.__main__ import cli

FINDER = "_editable_skbc_xquant_kv"

if __name__ == "__main__":
    for file in files("xquant-kv") or []:
        if file.name == "libxquant_kernels.so":
            os.environ.setdefault("XQUANT_NATIVE_LIBRARY", str(file.locate()))
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != FINDER]
    cli()
