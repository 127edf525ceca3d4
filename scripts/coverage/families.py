"""One network of every family of timm: the smallest, at the smallest pictures that it takes.

A family is a module of ``timm.models``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from .network import Batch, Network, normal

SMALLEST = frozenset(
    """
beit_base_patch16_224 halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
test_convnext cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny
deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1
efficientformerv2_s0 test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0
vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m
ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t
inception_next_atto ens_adv_inception_resnet_v2 adv_inception_v3 inception_v4 lcnetv2_small levit_128s
lowformer_b0 test_mambaout test_coatnet poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050
mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_parfac_gap nasnetalarge jx_nest_tiny
nextvit_small test_nfnet pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002
repghostnet_050 repvit_m1 res2next50 resnest14d test_resnet resnetv2_18 rexnet_100 selecsls42
legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_tiny_window16_256 swinv2_cr_tiny_224 tiny_vit_5m_224
tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny test_vit vit_tiny_r_s16_p8_224
test_vit_relpos samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw
legacy_xception xception41p xcit_nano_12_p8_224
    """.split()
)
"""The member with the fewest parameters of each family of timm 1.0.31; of another family, the first by
name."""
PIXELS = (64, 96, 128, 192, 224, 256)


def networks() -> Iterator[Network]:
    """One network of every family."""
    timm = import_module("timm")
    for family in sorted(timm.list_modules()):
        members = timm.list_models(module=family)
        if not members:
            continue
        name = next((name for name in members if name in SMALLEST), sorted(members)[0])
        family = Family(name)
        yield Network(name=name, library="timm", make=family.make, batch=family.batch)


class Family:
    """A network of timm and the size of its pictures, which is found when it is made."""

    def __init__(self, name: str) -> None:
        self.name, self.pixels = name, 0

    def make(self) -> nn.Module:
        """The network, for the smallest pictures with which it runs; dropout where it can be asked for."""
        for pixels in PIXELS:
            with contextlib.suppress(Exception):
                self._made(pixels).eval()(self._pictures(2, pixels))
                break
        else:
            pixels = int(self._pretrained.input_size[-1])
        self.pixels = pixels
        torch.manual_seed(0)
        return self._made(pixels)

    def batch(self, samples: int) -> Batch:
        """Pictures."""
        return {"x": self._pictures(samples, self.pixels)}

    def _made(self, pixels: int) -> nn.Module:
        timm = import_module("timm")
        tries = [{"img_size": pixels, "drop_path_rate": 0.1}, {"img_size": pixels}, {"drop_path_rate": 0.1}]
        for options in tries if pixels else ():
            with contextlib.suppress(Exception):
                return timm.create_model(self.name, num_classes=10, **options)
        return timm.create_model(self.name, num_classes=10)

    @functools.cached_property
    def _pretrained(self) -> Any:
        return import_module("timm").models.get_pretrained_cfg(self.name)

    def _pictures(self, samples: int, pixels: int) -> torch.Tensor:
        return normal(samples, samples, int(self._pretrained.input_size[0]), pixels, pixels)
