"""Whether an optional package can be imported here; whatever it does instead is a reason, not an error."""

import importlib

from charm_megatron.errors import error_text

MOST_REASON_CHARACTERS = 120


def import_problem(title: str, module: str) -> str | None:
    """Why `module` of the package called `title` cannot be had, a clause; None where it is imported."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"{title} is not installed"
        return broken(title, error)
    except Exception as error:  # a package that was built for another torch may raise anything
        return broken(title, error)
    return None


def broken(title: str, error: Exception) -> str:
    """That a package is there, and what it raises."""
    return f"{title} is installed, but does not load: {error_text(error, MOST_REASON_CHARACTERS)}"
