"""Images in folders, broken ones among them, and the data that needs no download."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from mgwfbp import TrainError
from mgwfbp.train.batches import Batches
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.data import open_data
from mgwfbp.train.images import ImageSamples
from mgwfbp.train.models import build_model, classification_loss, scores
from mgwfbp.train.sampler import TrainBatches, ValidBatches
from tests.train.ranks import said, started, train, train_to_end

CPU = torch.device("cpu")


def make_folder(root: Path, *, per_class: int = 12, classes: tuple[str, ...] = ("blue", "red")) -> Path:
    """ImageNet's layout in small: classes that differ in colour, images that differ in size."""
    for part in ("train", "val"):
        for label, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(per_class):
                noise = os.urandom(40 * (36 + index) * 3)
                image = Image.frombytes("RGB", (40, 36 + index), noise)
                tint = Image.new("RGB", image.size, (220 * label, 40, 220 * (1 - label)))
                Image.blend(image, tint, 0.7).save(folder / f"{index:03d}.png")
    return root


def break_images(root: Path) -> list[Path]:
    """A torn one, one that is none, and an empty one, all to train on; and one to validate on."""
    broken = [root / "train" / "blue" / f"{index:03d}.png" for index in (1, 2, 5)]
    broken[0].write_bytes(broken[0].read_bytes()[:200])
    broken[1].write_text("not an image at all")
    broken[2].write_bytes(b"")
    other = root / "val" / "red" / "003.png"
    other.write_bytes(other.read_bytes()[:200])
    return [*broken, other]


CONFIG = TrainConfig(
    model="mobilenet_v3_small",
    strategy="single",
    workers=2,
    epochs=1,
    batch_size=4,
    image_size=32,
    lr=0.01,
    tensorboard=False,
)


def test_a_folder_of_images_is_trained_and_validated_on(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data")
    run = train_to_end(replace(CONFIG, data=str(root)), tmp_path / "run")
    assert run.results is not None
    assert run.results.steps == 24 // 8
    assert run.results.more["num_skipped"] == 0


def test_a_broken_image_is_named_and_refused(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data")
    broken = break_images(root)
    folder = tmp_path / "run"
    with started(train, 2, tmp_path, replace(CONFIG, data=str(root)), folder, False) as ranks:
        assert ranks.wait() != [0, 0]
    assert any(f"{path}: not a readable image" in said(folder) for path in broken)
    assert "use --on-corrupt skip" in said(folder)


def test_broken_images_are_named_and_skipped(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data")
    broken = break_images(root)
    folder = tmp_path / "run"
    # As many as there are, so that every one of them is met.
    run = train_to_end(replace(CONFIG, data=str(root), on_corrupt="skip", workers=1), folder)
    assert run.results is not None
    assert run.results.more["num_skipped"] == len(broken)
    assert run.results.steps == 24 // 4
    for path in broken:
        assert said(folder).count(f"{path}: not a readable image") == 1


def test_a_broken_image_is_replaced_to_train_and_left_out_to_validate(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    broken = break_images(root)
    named: list[str] = []
    data = open_data(replace(CONFIG, data=str(root)))
    train_on = Batches(
        data.train,
        TrainBatches(24, 12, rank=0, workers=1, seed=0),
        CPU,
        loaders=0,
        refuse=False,
        on_skip=named.append,
    )
    assert [int((labels >= 0).sum()) for _, labels in train_on] == [12, 12]
    assert sorted(line.partition(":")[0] for line in named) == sorted(str(path) for path in broken[:3])
    validate_on = Batches(
        data.valid, ValidBatches(24, 5, rank=0, workers=1), CPU, loaders=0, refuse=False, on_skip=named.append
    )
    assert sum(int((labels >= 0).sum()) for _, labels in validate_on) == 23
    assert validate_on.num_skipped == 1


def test_crops_depend_on_seed_epoch_and_image_alone(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    images = ImageSamples(root / "train", 16, seed=1, augment=True)
    first = images[(0, 3)][0]
    before = torch.get_rng_state()
    assert torch.equal(images[(0, 3)][0], first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(images[(1, 3)][0], first)
    assert not torch.equal(ImageSamples(root / "train", 16, seed=2, augment=True)[(0, 3)][0], first)
    still = ImageSamples(root / "val", 16, seed=1, augment=False)
    assert torch.equal(still[(0, 3)][0], still[(5, 3)][0])


def test_loaders_change_nothing_in_what_is_loaded(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    found = []
    for loaders in (0, 2):
        sampler = TrainBatches(24, 6, rank=0, workers=1, seed=0)
        images = ImageSamples(root / "train", 16, seed=1, augment=True)
        batches = Batches(images, sampler, CPU, loaders=loaders, refuse=True, on_skip=print)
        for epoch in (0, 1):
            sampler.go_to(epoch, 1)
            found.append([part for batch in batches for part in batch])
    assert len(found[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip([*found[0], *found[1]], [*found[2], *found[3]], strict=True))


def test_train_and_val_must_have_the_same_classes(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "green")
    with pytest.raises(TrainError, match="'green' is in one of them only"):
        open_data(replace(CONFIG, data=str(tmp_path)))


def test_one_class_alone_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, classes=("blue",))
    with pytest.raises(TrainError, match="one class alone, 'blue'"):
        open_data(replace(CONFIG, data=str(tmp_path)))


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_folder_without_images_is_refused(tmp_path: Path, missing: str) -> None:
    make_folder(tmp_path)
    for path in (tmp_path / missing).rglob("*.png"):
        path.unlink()
    with pytest.raises(TrainError, match=f"no data: {tmp_path / missing} holds no CLASS/IMAGE") as caught:
        open_data(replace(CONFIG, data=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_the_digits_are_split_once_and_for_all() -> None:
    data = open_data(TrainConfig())
    assert (len(data.train), len(data.valid), data.num_classes, data.channels) == (1437, 360, 10, 1)
    images = torch.stack([data.train[(0, index)][0] for index in range(1437)])
    assert abs(images.mean()) < 0.05
    assert abs(images.std() - 1) < 0.05
    seen = {data.train[(0, index)][0].numpy().tobytes() for index in range(1437)}
    assert sum(data.valid[(0, index)][0].numpy().tobytes() in seen for index in range(360)) == 0
    large = open_data(TrainConfig(model="resnet18"))
    assert large.train[(0, 0)][0].shape == (3, 32, 32)


def test_random_images_are_the_same_every_time() -> None:
    data = open_data(TrainConfig(data="synthetic", image_size=8, num_samples=64, num_classes=3))
    image, label, _ = data.train[(0, 5)]
    again, same_label, _ = data.train[(3, 5)]
    assert torch.equal(image, again)
    assert label == same_label
    assert not torch.equal(image, data.valid[(0, 5)][0])


def test_googlenet_trains_its_auxiliary_heads() -> None:
    torch.manual_seed(0)
    model = build_model("googlenet", num_classes=10, channels=3).train()
    output = model(torch.randn(2, 3, 32, 32))
    labels = torch.tensor([1, 2])
    loss = classification_loss(output, labels)
    main = torch.nn.functional.cross_entropy(output.logits, labels)
    auxiliary = [torch.nn.functional.cross_entropy(head, labels) for head in (output.aux_logits2, output.aux_logits1)]
    assert torch.allclose(loss, main + 0.3 * sum(auxiliary))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    assert scores(model(torch.randn(2, 3, 32, 32))).shape == (2, 10)
