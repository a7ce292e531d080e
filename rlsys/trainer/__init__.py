"""The Megatron-Core trainer. Importing any part of it applies the patches, before megatron.core is imported."""

import megatron_patches

megatron_patches.apply()
