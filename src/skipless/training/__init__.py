"""Training: one experiment from its configuration to checkpoints, evaluation and logs."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "accuracy": ["ImageResult", "evaluate_images"],
        "checkpoint": ["load_weights", "save_weights"],
        "config": ["DataConfig", "Experiment", "OptimizerConfig", "TrainConfig"],
        "evaluate": ["EvalResult", "evaluate_loss", "evaluate_text"],
        "run": ["RunFolder", "read_metrics"],
        "tasks": ["score_tasks"],
        "trainer": ["Result", "train"],
    },
)
