"""Opens a store, loads cubins, binds tensors, launches; imports no compiler."""
