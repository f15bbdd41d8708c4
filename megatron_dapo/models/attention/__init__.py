"""What stands in the place of a layer's attention, and its parts."""
