"""``python -m lora_merge.merging`` is ``lora-merge``."""

from lora_merge.merging.cli import main

if __name__ == "__main__":
    main(prog_name="lora-merge")
