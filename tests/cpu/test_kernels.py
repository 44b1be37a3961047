"""Kernel names seen in profiles, and what they are."""

import pytest

from llm_fp8.kernels import gemm_kind

SEEN = {
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT": "fp8",
    "nvjet_sm90_qrtst_96x128_128x7_2x1_v_bz_coopA_algo2_TNN": "fp8",
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN": "fp8",
    "nvjet_sm90_tst_128x192_64x5_4x1_v_bz_coopB_NTN": "bf16",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas": "fp32",
    "void cudnn::fusion::fmha_reduce_head_ragged<true>(void const*)": None,
    "void transformer_engine::rmsnorm_fwd_tuned_kernel<float8>": None,
    "some_future_gemm_of_another_name": "unknown",
}


@pytest.mark.parametrize("name", SEEN)
def test_kind(name):
    assert gemm_kind(name) == SEEN[name]
