"""Names of real kernels and ops, as libraries write them, and rules of users."""

from __future__ import annotations

import json

import pytest

from moe_megakernel.profiling import ProfileError, load_rules

NCCL = "(ncclDevKernelArgsStorage<4096ul>)"
NAMES = {
    f"ncclDevKernel_SendRecv{NCCL}": ("communication", None),
    f"ncclDevKernel_AllGather_RING_LL{NCCL}": ("communication", None),
    f"ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL{NCCL}": ("communication", None),
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": ("communication", None),
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": ("communication", None),
    "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": ("communication", None),
    "void nvshmemi_proxy_quiet_entrypoint<0>()": ("communication", None),
    "barrier_on_stream_kernel_threadgroup_nvshmem": ("communication", None),
    "void deep_ep::internode::dispatch<false, 8, false, 1024>(int4*, float*)": ("communication", "dispatch"),
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)": ("communication", "combine"),
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)": ("communication", "dispatch"),
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)": ("communication", "combine"),
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)": ("communication", "dispatch"),
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)": ("other", "route"),
    "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": (
        "communication",
        None,
    ),
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(x)": ("communication", None),
    "one_shot_all_reduce_kernel": ("communication", None),
    "void vllm::cross_device_reduce_1stage<nv_bfloat16, 8>(vllm::RankData*)": ("communication", None),
    "Memcpy PtoP (Device -> Device)": ("communication", None),
    "Memcpy DtoD (Device -> Device)": ("memory", None),
    "Memcpy HtoD (Pageable -> Device)": ("memory", None),
    "Memset (Device)": ("memory", None),
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 4, 64, 64>(x)": ("memory", None),
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(x)>": ("memory", None),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)": ("memory", None),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": ("other", None),
    "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, 8>(float*)": ("other", None),
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>(long)": ("other", None),
    "triton_poi_fused_add_mul_silu_3": ("other", None),
    "triton_red_fused__to_copy_mean_rsqrt_0": ("other", None),
    "triton_tem_fused_mm_2": ("gemm", None),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": ("gemm", None),
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": ("gemm", None),
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": ("gemm", None),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(x)": ("gemm", None),
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128>(x)": ("gemm", None),
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>>(x)": ("gemm", None),
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, 128u>(x)": ("gemm", None),
    "volta_sgemm_128x32_nt": ("gemm", None),
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1": ("gemm", None),
    "void split_embedding_codegen_forward_unweighted_kernel<float>(fbgemm_gpu::FixedDivisor)": ("other", None),
    "void permute_pooled_embs_kernel<float>(float const*, long const*)": ("other", None),
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64": ("gemm", None),
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
    "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int>>>>>(x)": ("gemm", "expert_gemm"),
    "void cutlass::Kernel<cutlass::gemm::kernel::GemmGrouped<x>>(x)": ("gemm", "expert_gemm"),
    "_gmm_kernel_grouped_gemm": ("gemm", "expert_gemm"),
    "fused_moe_kernel": ("gemm", "expert_gemm"),
    "void vllm::moe::moe_align_block_size_kernel<int>(int*)": ("other", "route"),
    "void vllm::moe::topkGatingSoftmax<8, 128, 4>(float const*)": ("other", "route"),
    "_permute_kernel": ("other", "dispatch"),
    "_unpermute_kernel": ("other", "combine"),
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)": ("attention", None),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>(x)": ("attention", None),
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x>>>": ("attention", None),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<x>)": ("attention", None),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1": ("attention", None),
    "void moe::sm90::layer_kernel<0, moe::ForwardParams>(moe::ForwardParams)": ("gemm", "fused"),
    "void moe::sm90::(anonymous namespace)::dispatch_kernel<(moe::Direction)0>(x)": ("communication", "dispatch"),
    "void moe::sm90::(anonymous namespace)::combine_kernel<moe::BackwardParams>(x)": ("communication", "combine"),
    "void moe::(anonymous namespace)::route_kernel<long>(moe::SortJob<long>)": ("other", "route"),
    "void moe::(anonymous namespace)::group_route_kernel<int>(moe::SortJob<int>)": ("other", "route"),
    "moe::(anonymous namespace)::backward_plan_kernel(int const*, moe::BackwardJob)": ("other", "route"),
    "moe::(anonymous namespace)::group_backward_plan_kernel(int const*)": ("other", "route"),
    "gloo:all_to_all": ("communication", "exchange"),
    "gloo:all_reduce": ("communication", None),
    "c10d::alltoall_base_": ("communication", "exchange"),
    "_c10d_functional::all_to_all_single": ("communication", "exchange"),
    "c10d::allreduce_": ("communication", None),
    "record_param_comms": ("communication", None),
    "aten::mm": ("gemm", None),
    "aten::addmm": ("gemm", None),
    "aten::_scaled_mm": ("gemm", None),
    "aten::_grouped_mm": ("gemm", "expert_gemm"),
    "mkldnn::_linear_pointwise": ("gemm", None),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("attention", None),
    "aten::copy_": ("memory", None),
    "aten::mul": ("other", None),
    "aten::max": ("other", None),
    "aten::permute": ("other", None),
    "": ("other", None),
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items(), ids=[name[:50] for name in NAMES])
def test_names(name, expected):
    assert load_rules().classify(name) == expected


AROUND = {
    # What stands around the launch: the parts of a GEMM, of NCCL's send and receive, and of an elementwise kernel.
    "moe.dispatch": ("dispatch", "dispatch", "dispatch"),
    "MoE combine": ("combine", "combine", "combine"),
    "token_dispatch": ("dispatch", "dispatch", "dispatch"),
    "_token_permutation": ("dispatch", "dispatch", "dispatch"),
    "token_unpermutation": ("combine", "combine", "combine"),
    "FusedDispatch": ("dispatch", "dispatch", "dispatch"),
    "FusedCombineBackward": ("combine", "combine", "combine"),
    "dispatch": ("dispatch", "dispatch", "dispatch"),
    "TopKRouter": ("route", "route", "route"),
    "moe.gate": ("route", "route", "route"),
    "moe gate_up": ("expert_gemm", "exchange", "rest"),
    "moe_layer": ("expert_gemm", "exchange", "rest"),
    "MoELayer": ("expert_gemm", "exchange", "rest"),
    "moe::dispatch_gemm_combine": ("expert_gemm", "exchange", "rest"),
    "Experts": ("expert_gemm", None, None),
    "shared_experts": ("rest", "rest", "rest"),
    "c10d::alltoall_base_": (None, "exchange", None),
    "autograd::engine::evaluate_function: _AllToAllBackward": (None, "exchange", None),
    "aten::_grouped_mm": ("expert_gemm", None, None),
    "aten::mm": (None, None, None),
    "ProfilerStep#3": (None, None, None),
    "Optimizer.step#AdamW.step": (None, None, None),
    "token_dispatcher": (None, None, None),
}


@pytest.mark.parametrize(("around", "expected"), AROUND.items(), ids=AROUND)
def test_surroundings(around, expected):
    rules = load_rules()
    kernels = ("nvjet_hsh_64x64", f"ncclDevKernel_SendRecv{NCCL}", "vectorized_elementwise_kernel")
    assert tuple(rules.classify(kernel, rules.surroundings(around))[1] for kernel in kernels) == expected


def write(tmp_path, *entries):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": entries}))
    return path


def test_rules_of_users_come_first(tmp_path):
    rules = load_rules(
        write(
            tmp_path,
            {"name": "^my_a2a", "class": "communication", "moe": "combine"},
            {"name": "nvjet_special", "moe": "none"},
            {"within": "^stage$", "if_class": "memory", "moe": "dispatch"},
        )
    )
    assert rules.classify("my_a2a_kernel") == ("communication", "combine")
    assert rules.classify("MY_A2A") == ("communication", "combine"), "case does not matter"
    inside = rules.surroundings("moe_layer")
    assert rules.classify("nvjet_special", inside) == ("gemm", None), "the class is left to the shipped rules"
    assert rules.classify("nvjet", inside) == ("gemm", "expert_gemm")
    stage = rules.surroundings("stage")
    assert rules.classify("Memset (Device)", stage) == ("memory", "dispatch")
    assert rules.classify("nvjet", stage) == ("gemm", None)
    assert rules.classify("nvjet", stage | inside) == ("gemm", "expert_gemm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected rules as JSON, got "),
        ("[]", 'expected an object with a list "rules", got list'),
        ('{"rules": {}}', 'expected an object with a list "rules", got dict'),
        ('{"rules": [1]}', "rule 0: expected an object of strings, got 1"),
        ('{"rules": [{"name": 1, "class": "gemm"}]}', "rule 0: expected an object of strings, got "),
        ('{"rules": [{"name": "a"}]}', "rule 0: expected class or moe, got name"),
        ('{"rules": [{"nam": "a", "class": "gemm"}]}', "rule 0: expected keys out of class, if_class, "),
        ('{"rules": [{"class": "gem"}]}', "rule 0: expected class out of gemm, attention, other, "),
        ('{"rules": [{"moe": "up"}]}', "rule 0: expected moe out of route, dispatch, "),
        ('{"rules": [{"class": "gemm", "if_class": "gemm"}]}', "rule 0: expected class or if_class, got both"),
        (
            '{"rules": [{"class": "gemm"}, {"name": "(", "moe": "rest"}]}',
            "rule 1: expected a regular expression as name",
        ),
    ],
)
def test_wrong_rules(tmp_path, text, message):
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"profile: {path}: ")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_rules(tmp_path):
    with pytest.raises(ProfileError, match="expected a file of rules, got No such file"):
        load_rules(tmp_path / "none.json")
