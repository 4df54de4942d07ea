"""Python runs this file when it starts, because `fulltilt run` put this folder on PYTHONPATH: it attaches the recorder.

It leaves no trace otherwise: the folder leaves sys.path again, and a sitecustomize of the user's own runs as ever.
Nothing that goes wrong here may reach the job.
"""


def _attach() -> None:
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    try:
        _run_the_users_own()
    finally:
        if os.environ.get("FULLTILT_RUN_DIR"):
            package = os.environ.get("FULLTILT_PACKAGE", "")
            try:
                sys.path.append(package)
                from fulltilt.recorder import attach

                attach.when_torch_is_imported()
            except Exception as error:
                if os.environ.get("FULLTILT_DEBUG"):
                    print(f"fulltilt: could not attach: {error!r}", file=sys.stderr)
            finally:
                if package in sys.path:
                    sys.path.reverse()
                    sys.path.remove(package)
                    sys.path.reverse()


def _run_the_users_own() -> None:
    """The sitecustomize that Python would have found without us."""
    import importlib.util
    import sys

    ours = sys.modules.pop("sitecustomize", None)
    spec = importlib.util.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_attach()
