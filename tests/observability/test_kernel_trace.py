"""Kernel names from profiles of an H200 and from other libraries and GPUs, each with its class, for example "gemm"."""

from __future__ import annotations

import pytest

from llm_fp8.observability.kernel_trace import (
    StepProfile,
    covered_s,
    gemm_kernels,
    gemm_kind,
    kernel_class,
    kernel_intervals,
    kernel_times,
    time_by_class,
    unrecognised_kernels,
)
from tests.support.recorded_kernels import finished_profile

GEMMS = {
    # names from profiles: cuBLAS 13 on an H200, for Transformer Engine, torchao and PyTorch
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT": "fp8",
    "nvjet_sm90_qrtst_96x128_128x7_2x1_v_bz_coopA_algo2_TNN": "fp8",
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN": "fp8",
    "nvjet_sm90_tst_128x192_64x5_4x1_v_bz_coopB_NTN": "bf16",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_"
    "execute_kernel__5x_cublas": "fp32",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x32_8x5_"
    "nn_align1::Params)": "fp32",
    # names of other versions and for other GPUs
    "nvjet_qqtst_128x128_128x6_2x1_v_bz_TNT": "fp8",
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN": "fp16",
    "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_Avec32UE8M0_Bvec32UE8M0_TNT": "fp8",
    "nvjet_sm100_tst_256x192_64x5_2x1_2cta_v_bz_TNT": "bf16",
    "nvjet_sm100_ootst_256x256_256x4_2x1_2cta_v_bz_Avec16UE4M3_Bvec16UE4M3_TNT": "fp4",
    "cutlass3x_sm100_bstensorop_s256x192x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_f16_f16_256x192x256_0_tnn_"
    "align32_o_vs16_2sm_bias_f16_relu": "fp4",
    "cutlass3x_sm100_bstensorop_s128x128x64gemm_block_scaled_ue8m0xf8_ue8m0xf8_f32_bf16_bf16_tnn": "fp8",
    "cutlass3x_sm100_bstensorop_s128x128x64gemm_block_scaled_ue8m0xe4m3_ue8m0xe4m3_f32_bf16_bf16_tnn": "fp8",
    "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x32_"
    "kernel__5x_cublas": "fp8",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_execute_segment_k_off_"
    "kernel__5x_cublas": "bf16",
    "cutlass3x_sm90_tensorop_gemm_e4m3_e4m3_f32_bf16_bf16_128x128x128_2x1x1_0_tnn_align16": "fp8",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)": "bf16",
    "cutlass3x_sm120_tensorop_gemm_f8_f8_f32_bf16_bf16_128x128x128_tnn_align16": "fp8",
    "ampere_fp16_s16816gemm_fp16_256x128_ldg8_f2f_stages_64x3_tn": "fp16",
    "ampere_h16816gemm_128x128_ldg8_stages_64x3_tn": "fp16",
    "ampere_sgemm_128x64_tn": "fp32",
    "cutlass_80_tensorop_i16832gemm_s8_128x128_64x3_tn_align16": "other",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<"
    "cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4>, "
    "cutlass::float_e4m3_t, cutlass::float_e4m3_t>, cutlass::bfloat16_t> > >": "fp8",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, "
    "false>(float)": "bf16",
    "triton_tem_fused__scaled_mm_7": "fp8",
    "triton_tem_fused_mm_3": "unknown",
    "some_future_gemm_of_another_name": "unknown",
}

OF_BOTH_TYPES = "void a_kernel_of_both_types<__nv_bfloat16, cutlass::float_e4m3_t>(__nv_bfloat16 const*)"
NO_GEMMS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_"
    "0": "attention",
    "void cudnn::fusion::fmha_reduce_head_ragged<true>(void const*, void*, unsigned int)": "attention",
    "void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 64>(void const*, void const*, void*, "
    "void*)": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)": "attention",
    "transformer_engine::fused_attn::cu_seqlens_padded_to_offsets(transformer_engine::fused_"
    "attn::RaggedOffsetMultipliers)": "attention",
    "void transformer_engine::kv_cache::convert_thd_to_bshd_kernel<__nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*, "
    "int*, int, int, int, int)": "attention",
    # names of flash-attn 3
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
    "cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<128>, cute::C<128>, cute::C<128> >, 128, "
    "cutlass::bfloat16_t, float, cutlass::arch::Sm90, true> > > >": "attention",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*, "
    "int)": "attention",
    "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*, __nv_fp8_e4m3*, "
    "float const*)": "cast",
    "transpose_optimized_kernel(__nv_fp8_e4m3 const*, float const*, __nv_fp8_e4m3*, unsigned long, "
    "unsigned long)": "cast",
    "void transformer_engine::(anonymous namespace)::amax_kernel<16, true, __nv_bfloat16>(__nv_bfloat16 const*, "
    "float*)": "cast",
    "void transformer_engine::detail::(anonymous namespace)::row_col_rht_gemm_device<int, int, int, "
    "cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<128>, cute::C<16>, cute::C<16> >, "
    "cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::float_e2m1_t, cutlass::float_ue4m3_t>(int, int, int)": "cast",
    "void transformer_engine::unary_kernel<16, true, float, transformer_engine::Empty, "
    "&transformer_engine::dispatch::fp8::detail::identity, __nv_bfloat16, __nv_fp8_e4m3>(__nv_bfloat16 const*)": "cast",
    "triton_poi_fused__scaled_mm__to_copy_clamp_clone_mul_reciprocal_silu_t_view_2": "cast",
    "triton_poi_fused__to_copy_clamp_exp2_floor_log2_mul_reciprocal_t_19": "cast",
    "triton_red_fused_abs_max_t_15": "cast",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16, __nv_bfloat16, "
    "__nv_fp8_e4m3>>()": "norm",
    "ln_tma_fwd_kernel": "norm",
    "void transformer_engine::gated_act_kernel<16, true, float, transformer_engine::Empty, &(float "
    "transformer_engine::silu<float, float>(float)), __nv_bfloat16, __nv_fp8_e4m3>(__nv_bfloat16 const*, "
    "__nv_fp8_e4m3*, float const*)": "activation",
    "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous "
    "namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}>()": "activation",
    "triton_poi_fused__to_copy_clamp_exp2_floor_log2_mul_reciprocal_silu_silu_backward_t_view_7": "cast",
    "void transformer_engine::fused_rope_backward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, int const*, float "
    "const*)": "rope",
    "_split_rope_kernel": "rope",
    "cross_entropy_backward_kernel": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, at::native::(anonymous "
    "namespace)::LogSoftMaxBackwardEpilogue>(float*, float const*, float const*, long)": "loss",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, "
    "float*)": "loss",
    "_update_kernel": "optimizer",
    "_eight_bit_update_kernel": "optimizer",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "void at::native::elementwise_kernel<128, 4, "
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>>()": "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, "
    "unsigned int, 4, 64, 64>()": "copy",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, "
    "3ul> >(int)": "elementwise",
    "void (anonymous namespace)::indexing_backward_kernel<c10::BFloat16, 4>(long const*, long const*, c10::BFloat16 "
    "const*, c10::BFloat16*, long, long, long, long, bool)": "elementwise",
    "triton_poi_fused_add_view_20": "elementwise",
    "a_kernel_of_no_known_library": "other",
    "void a_kernel_that_shows_its_type<__nv_bfloat16, float>(__nv_bfloat16 const*, float*)": "other",
    OF_BOTH_TYPES: "other",
    "void batch_trsm_left_kernel<float, 256, 4, false, true, true, true, false, true>(cublasTrsmParams<float>, float, "
    "float const*, int)": "solver",
    "_bmm_outer_product_kernel": "elementwise",
    # names of flash-linear-attention, causal-conv1d and mamba-ssm
    **dict.fromkeys(
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64 chunk_fwd_kernel_o chunk_bwd_kernel_dqkwg gdn_gate_bwd_kernel "
        "chunk_local_cumsum_scalar_kernel recompute_w_u_fwd_kernel _state_passing_fwd_kernel "
        "solve_tril_16x16_kernel merge_16x16_to_64x64_inverse_kernel prepare_wy_repr_bwd_kernel".split(),
        "linear_attention",
    ),
    "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, c10::BFloat16, c10::BFloat16> >"
    "(ConvParamsBase)": "linear_attention",
    "l2norm_fwd_kernel": "norm",
    "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, "
    "false>(cublasSplitKParams<float>)": "gemm",
}


@pytest.mark.parametrize("name", GEMMS)
def test_gemm_kind_is_the_operand_type(name):
    assert kernel_class(name) == "gemm"
    assert gemm_kind(name) == GEMMS[name]


@pytest.mark.parametrize("name", NO_GEMMS)
def test_kernel_class_of_other_kernels(name):
    assert kernel_class(name) == NO_GEMMS[name]
    assert gemm_kind(name) is None


def test_kernels_of_no_rule_are_unrecognised_unless_they_show_wider_types():
    times = {name: (1, 0.001) for name in NO_GEMMS}
    assert set(unrecognised_kernels(times).names) == {"a_kernel_of_no_known_library", OF_BOTH_TYPES}


STEP = {
    "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT": (160, 0.010229),
    "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT": (96, 0.004978),
    "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT": (2, 0.005362),
    "_update_kernel": (98, 0.006691),
}
"""Some kernels of an fp8 step of Llama-3.2-1B on an H200: a dict from name to (launches, seconds)."""


def test_time_is_summed_by_class_and_by_operand_type():
    by_class = time_by_class(STEP)
    assert {name: kernels.count for name, kernels in by_class.items()} == {"gemm": 258, "optimizer": 98}
    assert list(by_class) == ["gemm", "optimizer"], "the class with the most time comes first"
    assert by_class["gemm"].time_s == pytest.approx(0.020569)
    gemms = [name for name in STEP if name.startswith("nvjet")]
    assert list(by_class["gemm"].names) == sorted(gemms, key=lambda name: -STEP[name][1])
    kinds = gemm_kernels(STEP)
    assert {kind: kernels.count for kind, kernels in kinds.items()} == {"fp8": 256, "bf16": 2}
    assert kinds["fp8"].time_s == pytest.approx(0.015207)


def test_annotations_of_a_profile_do_not_count_as_kernels():
    profile = finished_profile(
        ("Memset (Device)", 0, 10), ("Memset (Device)", 20, 25), annotations=(("Optimizer.step#AdamW.step", 0, 100),)
    )
    assert kernel_times(profile) == {"Memset (Device)": (2, pytest.approx(15e-6))}
    assert kernel_intervals(profile)[1] == ("Memset (Device)", pytest.approx((20e-6, 25e-6)))


def test_overlapping_intervals_count_once_and_communication_is_a_share():
    assert covered_s([(5, 6), (0, 2), (1, 3), (3, 4), (1, 2)]) == 5
    profile = StepProfile(span_s=2.0, communication_s=1.0, exposed_communication_s=0.5)
    assert profile.figures()["communication_share"] == 0.5 and profile.figures()["exposed_communication_share"] == 0.25
