"""Bad input is one line and status 2, as in the training scripts."""

import argparse
import sys
from typing import NoReturn


def refuse(message: str) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the page of usage that argparse prints."""
        refuse(f"{message}; see --help")
