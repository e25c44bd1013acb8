// Preloaded: answers every cpuid of the process without AVX512, AMX and AVX-VNNI, by CPUID faulting
// (Linux, Intel), and ends it unless that works. Code that asks nothing is not limited.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static long allow(int is_allowed) { return syscall(SYS_arch_prctl, 0x1012 /* ARCH_SET_CPUID */, is_allowed); }

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)r[REG_RIP];
    unsigned leaf = r[REG_RAX], sub = r[REG_RCX], a, b, c, d;
    if (code[0] != 0x0f || code[1] != 0xa2) { signal(SIGSEGV, SIG_DFL); return; }  // a real fault
    allow(1);
    __cpuid_count(leaf, sub, a, b, c, d);
    allow(0);
    if (leaf == 7 && sub == 0) b &= ~0xdc230000u, c &= ~0x5842u, d &= ~0x3c0010cu;
    if (leaf == 7 && sub == 1) a &= ~0xa00030u, d &= ~0x280530u;
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d, r[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    unsigned a, b = 1u << 16, c, d;
    if (sigaction(SIGSEGV, &action, NULL) == 0 && allow(0) == 0) __cpuid_count(7, 0, a, b, c, d);
    if (b >> 16 & 1) _exit(125);  // AVX512F is still there
}
