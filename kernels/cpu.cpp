// Detects the instruction sets of this machine.

#include "headway.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)
bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tile = d & (1u << 24), has_bf16 = d & (1u << 22), has_vnni = c & (1u << 11);
  if (!has_tile || !has_bf16 || !has_vnni) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return false;  // AVX512-BF16
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

HW_API int32_t hw_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && has_amx()) return HW_AMX;
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) return HW_AVX512_VNNI;
  if (has_avx512) return HW_AVX512;
  if (has_avx2) return HW_AVX2;
#endif
  return HW_PLAIN;
}

HW_API int32_t hw_abi_version() { return HW_ABI_VERSION; }
