"""Theory of the signal at initialisation, in NumPy: kernels, attention matrices, activations, certificate."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "activations": ["ShapedActivation"],
        "certificate": ["BlockReport", "Certificate", "Verdict", "certify"],
        "kernels": ["repeat_rate"],
        "propagation": [
            "Attend",
            "AttendByHead",
            "AttendInput",
            "Chain",
            "KernelLayer",
            "MirroredMlp",
            "Mlp",
            "Skip",
            "sub_block",
        ],
        "schemes": [
            "ExponentialSPA",
            "Scheme",
            "StandardAttention",
            "UniformSPA",
            "ValueSkipInit",
            "carrying",
            "register_scheme",
        ],
        "shapes": [
            "AlibiShape",
            "AttentionShape",
            "DenseShape",
            "ExponentialShape",
            "IdentityShape",
            "PlainShape",
            "RescaledShape",
            "ShapeByHead",
            "TableShape",
            "UniformShape",
        ],
        "shaping": ["dks", "tat"],
    },
)
