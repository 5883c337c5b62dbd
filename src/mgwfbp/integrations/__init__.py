"""Our DDP inside of other training libraries: a module for each, which alone imports it.

``lightning`` (Lightning's Trainer and Fabric), ``accelerate``, ``transformers`` (Hugging Face's Trainer), ``ray`` (Ray
Train).
"""

from mgwfbp.errors import IntegrationError

__all__ = ["missing"]


def missing(library: str, error: ImportError) -> IntegrationError:
    """Return the error that says what to install."""
    needed = library.partition("[")[0]
    return IntegrationError(
        f"mgwfbp.integrations.{needed} needs {needed}, which cannot be imported ({error}): pip install '{library}'"
    )
