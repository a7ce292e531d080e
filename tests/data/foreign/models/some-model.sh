MODEL_ARGS=(--num-layers 48 --hidden-size 2048)
