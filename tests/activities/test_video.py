"""Encoded clips as a player reads them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from activities.video import ClipTooLargeError, EncodedClip, encode_clip

NO_LIMIT = 1 << 40

Frames = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def frames() -> Frames:
    """17 frames of 96x64: a green square walks over a red ground."""
    made = np.zeros((17, 64, 96, 3), np.uint8)
    made[...] = (200, 30, 60)
    for index in range(17):
        made[index, 10:30, 4 * index : 4 * index + 20] = (20, 200, 90)
    return made


def atoms(path: Path) -> Iterator[str]:
    """Names of the top-level boxes of an MP4, in order."""
    content, position = path.read_bytes(), 0
    while position < len(content):
        yield content[position + 4 : position + 8].decode("ascii")
        size = int.from_bytes(content[position : position + 4], "big")
        assert size >= 8
        position += size


class TestVideo:
    def test_the_index_comes_before_the_frames_so_that_it_plays_while_it_loads(
        self, frames: Frames, tmp_path: Path
    ) -> None:
        order = list(atoms(encode_clip(frames, fps=8, folder=tmp_path, max_video_bytes=NO_LIMIT).video))
        assert order.index("moov") < order.index("mdat")

    def test_every_browser_plays_the_format(self, frames: Frames, tmp_path: Path) -> None:
        clip = encode_clip(frames, fps=8, folder=tmp_path, max_video_bytes=NO_LIMIT)
        with av.open(str(clip.video)) as container:
            codec = container.streams.video[0].codec_context
            assert (codec.name, codec.profile, codec.pix_fmt) == ("h264", "High", "yuv420p")
            assert (codec.colorspace, codec.color_primaries, codec.color_trc) == (1, 1, 1)  # BT.709
            assert codec.color_range == 1  # limited, as players assume

    @pytest.mark.parametrize(
        ("fps", "expected"),
        [
            (8, Fraction(8)),
            (23.976, Fraction(2997, 125)),
            (24_000 / 1001, Fraction(24_000, 1001)),
            (0.5, Fraction(1, 2)),
        ],
    )
    def test_frames_and_rate_are_kept_fractions_too(
        self, frames: Frames, tmp_path: Path, fps: float, expected: Fraction
    ) -> None:
        clip = encode_clip(frames, fps=fps, folder=tmp_path, max_video_bytes=NO_LIMIT)
        with av.open(str(clip.video)) as container:
            stream = container.streams.video[0]
            assert stream.average_rate == expected
            assert sum(1 for _ in container.decode(video=0)) == 17
            assert (stream.width, stream.height) == (96, 64)
        assert clip == EncodedClip(video=clip.video, poster=clip.poster, width=96, height=64, num_frames=17, fps=fps)

    def test_colours_survive(self, frames: Frames, tmp_path: Path) -> None:
        clip = encode_clip(frames, fps=8, folder=tmp_path, max_video_bytes=NO_LIMIT)
        with av.open(str(clip.video)) as container:
            decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert np.abs(decoded[:, 40:60].astype(int) - frames[:, 40:60]).max() <= 6
        assert np.abs(decoded.astype(int) - frames).mean() < 3

    def test_the_same_frames_make_the_same_bytes(self, frames: Frames, tmp_path: Path) -> None:
        large = np.tile(frames, (1, 8, 8, 1))  # A small clip is encoded by one thread anyway.
        one = encode_clip(large, fps=8, folder=tmp_path / "1", max_video_bytes=NO_LIMIT)
        two = encode_clip(large, fps=8, folder=tmp_path / "2", max_video_bytes=NO_LIMIT)
        assert one.video.read_bytes() == two.video.read_bytes()
        assert one.poster.read_bytes() == two.poster.read_bytes()
        # With more than one thread the bytes would depend on the number of cores; x264 notes its settings in the file.
        assert b" threads=1 " in one.video.read_bytes()

    def test_one_frame_and_the_smallest_side_are_a_clip(self, tmp_path: Path) -> None:
        clip = encode_clip(np.zeros((1, 2, 2, 3), np.uint8), fps=1, folder=tmp_path, max_video_bytes=NO_LIMIT)
        with av.open(str(clip.video)) as container:
            assert sum(1 for _ in container.decode(video=0)) == 1

    def test_frames_that_are_a_view_of_other_memory_are_encoded_as_they_look(
        self, frames: Frames, tmp_path: Path
    ) -> None:
        view = encode_clip(frames[:, ::2, ::-2], fps=8, folder=tmp_path / "1", max_video_bytes=NO_LIMIT)
        copy = encode_clip(frames[:, ::2, ::-2].copy(), fps=8, folder=tmp_path / "2", max_video_bytes=NO_LIMIT)
        assert view.video.read_bytes() == copy.video.read_bytes()


class TestPoster:
    def test_it_is_the_middle_frame(self, frames: Frames, tmp_path: Path) -> None:
        clip = encode_clip(frames, fps=8, folder=tmp_path, max_video_bytes=NO_LIMIT)
        with Image.open(clip.poster) as poster:
            assert (poster.format, poster.size) == ("WEBP", (96, 64))
            shown = np.asarray(poster.convert("RGB")).astype(int)
        differences = [np.abs(shown - frame).mean() for frame in frames]
        assert int(np.argmin(differences)) == 8


class TestRefusals:
    def test_a_clip_over_the_limit_leaves_no_file(self, frames: Frames, tmp_path: Path) -> None:
        size = encode_clip(frames, fps=8, folder=tmp_path / "1", max_video_bytes=NO_LIMIT).video.stat().st_size
        encode_clip(frames, fps=8, folder=tmp_path / "2", max_video_bytes=size)
        with pytest.raises(ClipTooLargeError):
            encode_clip(frames, fps=8, folder=tmp_path / "3", max_video_bytes=size - 1)
        assert list((tmp_path / "3").iterdir()) == []

    def test_a_noisy_clip_is_stopped_on_the_way(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(1).integers(0, 255, (60, 64, 64, 3), np.uint8)
        with pytest.raises(ClipTooLargeError):
            encode_clip(noise, fps=8, folder=tmp_path, max_video_bytes=10_000)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_written_leaves_no_file(self, frames: Frames, tmp_path: Path) -> None:
        (tmp_path / "poster.webp").mkdir()
        with pytest.raises(OSError, match="poster"):
            encode_clip(frames, fps=8, folder=tmp_path, max_video_bytes=NO_LIMIT)
        assert not (tmp_path / "video.mp4").exists()

    @pytest.mark.parametrize(
        "made",
        [
            np.zeros((0, 4, 4, 3), np.uint8),
            np.zeros((1, 0, 4, 3), np.uint8),
            np.zeros((1, 5, 4, 3), np.uint8),
            np.zeros((1, 4, 5, 3), np.uint8),
            np.zeros((1, 4, 4, 4), np.uint8),
            np.zeros((4, 4, 3), np.uint8),
            np.zeros((1, 4, 4, 3), np.float32),
        ],
    )
    def test_other_shapes_and_odd_sides_are_refused(self, made: Frames, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"frames|sides"):
            encode_clip(made, fps=8, folder=tmp_path, max_video_bytes=NO_LIMIT)

    @pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 1e-9])
    def test_a_rate_that_is_none_is_refused(self, frames: Frames, tmp_path: Path, fps: float) -> None:
        with pytest.raises(ValueError, match="fps"):
            encode_clip(frames, fps=fps, folder=tmp_path, max_video_bytes=NO_LIMIT)
