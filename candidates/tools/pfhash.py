import sys,os,hashlib,subprocess,tempfile,re
os.environ.setdefault("CUTE_DSL_ARCH","sm_90a")
from tsmla_kernels.catalog import MLA_PREFILL, mla_prefill_config
from tsmla_kernels.compile import compile_kernel
from tsmla_kernels.resources import cubin_of
NV=subprocess.run("find /opt/venv -name nvdisasm -type f | head -1",shell=True,capture_output=True,text=True).stdout.strip()
for o in ({},{"dtype":"float8_e4m3fn"}):
    c=compile_kernel(MLA_PREFILL, mla_prefill_config(o),"sm_90a")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin_of(c.module)); f.flush(); s=subprocess.run([NV,"-c",f.name],capture_output=True,text=True).stdout
    ins=[re.sub(r"/\*[0-9a-f]+\*/","",l).strip() for l in s.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/",l)]
    print(o,hashlib.sha1("\n".join(ins).encode()).hexdigest()[:10],len(ins))
