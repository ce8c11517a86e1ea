"""How is this run? Its loss scales, gradients, updates and last steps."""
