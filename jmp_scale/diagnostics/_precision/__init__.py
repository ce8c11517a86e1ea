"""Is half precision enough for this program?

`precision_report` reads a program, `compare_gradients` runs it beside float32, and
`sensitive_products` runs it with each product in turn in float32, by a `probe`.

In the report, `walk` goes through the traced equations with the `rules` of one
operation, the `loops` and the `work`. `conclusions` has the rules of a whole
program. `facts` and `lineage` are about values, a `step` is an equation.
"""
