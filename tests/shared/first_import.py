"""Import each public name before all others, in a process of its own; print those that cannot be the first, as JSON.

The zygote runs this: other libraries, which take the time, are imported; the package is imported again from scratch.
"""

import json
import os
import sys


def main() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("uvit_decay", "beartype")]:
        del sys.modules[name]
    import beartype.door  # noqa: F401  which remembers classes by their names, and would compare with those from before

    import uvit_decay

    groups = {package: [package] for package in uvit_decay.SUBPACKAGES}
    for name, home in uvit_decay.MODULES.items():
        groups.setdefault(f"a name of {home}", []).append(name)
    failed = []
    for names in groups.values():
        child = os.fork()
        if not child:
            import_names(names)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            failed.append(names)
    print(json.dumps(failed))


def import_names(names: list[str]) -> None:
    """Import the public names of the package and of its subpackages; end with an error if one fails."""
    import uvit_decay

    assert not [name for name in sys.modules if name.startswith("uvit_decay.")], "something was imported before"
    try:
        for name in names:
            value = getattr(uvit_decay, name)
            if name in uvit_decay.SUBPACKAGES:
                for inner in value.__all__:
                    getattr(value, inner)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


if __name__ == "__main__":
    main()
