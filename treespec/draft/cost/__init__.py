"""The cost model: what a cycle costs, what it brings, and the choices that follow."""
