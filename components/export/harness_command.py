"""lm-evaluation-harness's command line with `--model caltune`, for versions that look for no plugins (0.4.13)."""

from __future__ import annotations


def main() -> None:
    """Takes `lm_eval`'s arguments."""
    from lm_eval.__main__ import cli_evaluate

    from components.export import harness  # noqa: F401 - importing it registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
