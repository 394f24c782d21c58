#!/usr/bin/env bash
# Pictures with and without the decay: a small class-conditional U-ViT on CIFAR-10 for 14 epochs, alpha_min 1.0 and 0.8,
# of the same start and seed: losses, distances, probes over layers, a grid of 100 samples each.
#
#     nice -n 19 benchmarks/studies/pictures.sh TRAIN TEST      # class folders or zips of class folders
#
# Run again to continue after an interruption.
set -euo pipefail
cd "$(dirname "$0")/../.."
train=$1 test=$2
export OMP_NUM_THREADS=1
for alpha_min in 0.8 1.0; do
    name="pictures_$alpha_min"
    python train.py fit --config benchmarks/studies/pictures.yaml --data.path "$train" --data.test_path "$test" \
        --model.net.alpha_min "$alpha_min" --trainer.logger.experiment "$name" --ckpt_path auto
    python sample.py --ckpt "$(ls -d "runs/$name"/version_* | tail -1)/checkpoints/last.ckpt" --num 100 \
        --out "runs/$name.png"
done
python evaluate.py compare runs/pictures_{0.8,1.0}/version_* --x step --out runs/pictures_compare.png
