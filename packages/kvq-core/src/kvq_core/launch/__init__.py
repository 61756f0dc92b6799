"""From a validated call to kernels on a device: dispatch, argument bundles, launches, workspace, replay and warm-up."""
