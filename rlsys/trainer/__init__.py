"""The Megatron-Core trainer.

Importing the package applies megatron_patches before any of its modules imports megatron.core.
"""

import megatron_patches

megatron_patches.apply()
