"""WebAssembly: Python or a compiled module in wasmtime."""
