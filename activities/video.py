"""From frames to the two files of a clip: an MP4 that plays while it loads, and its poster.

Imports PyAV and numpy, so only GPU workers import this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image

_KEYFRAME_SECONDS = 2
_POSTER_QUALITY = 85
_H264 = {"profile": "high", "preset": "medium", "crf": "18"}


class ClipTooLargeError(Exception):
    """The encoded clip is larger than allowed."""


@dataclass(frozen=True, kw_only=True)
class EncodedClip:
    """The local files of a clip and what they show."""

    video: Path
    poster: Path
    width: int
    height: int
    num_frames: int
    fps: float


def encode_clip(frames: npt.NDArray[np.uint8], *, fps: float, folder: Path, max_video_bytes: int) -> EncodedClip:
    """Encode frames as H.264 and the middle one as WebP. Blocking: call it in a thread.

    The same frames make the same bytes on the same build of the encoder.

    Args:
        frames: RGB, uint8, shape [frames, height, width, 3], at least one frame, even sides.
        fps: frames per second; fractions are kept.
        folder: where the files are made, itself made when missing.
        max_video_bytes: limit of the MP4.

    Raises:
        ClipTooLargeError: over the limit.
        ValueError: frames or fps are not as described.
        OSError: the files cannot be written.

    After an error neither file is there.
    """
    _check(frames, fps)
    folder.mkdir(parents=True, exist_ok=True)
    video, poster = folder / "video.mp4", folder / "poster.webp"
    num_frames, height, width, _ = frames.shape
    try:
        _encode_video(frames, fps, video, max_video_bytes)
        Image.fromarray(frames[num_frames // 2]).save(poster, format="WEBP", quality=_POSTER_QUALITY)
    except BaseException:
        video.unlink(missing_ok=True)
        poster.unlink(missing_ok=True)
        raise
    return EncodedClip(video=video, poster=poster, width=width, height=height, num_frames=num_frames, fps=fps)


def _check(frames: npt.NDArray[np.uint8], fps: float) -> None:
    match frames.shape:
        case (count, height, width, 3) if frames.dtype == np.uint8 and count and height and width:
            if height % 2 or width % 2:
                raise ValueError(f"sides of a clip are even, not {width}x{height}")
        case shape:
            raise ValueError(f"frames are uint8 [frames, height, width, 3], not {frames.dtype} {list(shape)}")
    if not math.isfinite(fps) or not _rate(fps):
        raise ValueError(f"fps is a positive number, not {fps}")


def _rate(fps: float) -> Fraction:
    """Exact for 24000/1001 and its like; 0 for what is no rate."""
    return max(Fraction(fps).limit_denominator(1001), Fraction(0))


def _encode_video(frames: npt.NDArray[np.uint8], fps: float, path: Path, max_bytes: int) -> None:
    written = 0
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=_rate(fps), options=_H264)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        codec = stream.codec_context
        codec.thread_count = 1  # The bytes depend on it.
        codec.gop_size = max(1, round(fps * _KEYFRAME_SECONDS))
        codec.colorspace, codec.color_range = Colorspace.ITU709, ColorRange.MPEG
        codec.color_primaries, codec.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        for frame in _converted(frames):
            for packet in stream.encode(frame):
                written += packet.size
                _check_size(written, max_bytes)
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    _check_size(path.stat().st_size, max_bytes)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ClipTooLargeError(f"the clip is larger than {limit} bytes")


def _converted(frames: npt.NDArray[np.uint8]) -> Iterator[av.VideoFrame]:
    for index, rgb in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
        )
        frame.pts = index
        yield frame
